"""``gradveil`` and ``python -m gradveil``: the command line, which Ctrl-C ends without a traceback at any time."""

from gradveil.heap import keep_freed_memory
from gradveil.interrupts import ending_with, stop_on_ctrl_c, work_is_over


def main() -> None:
    """Import and run the command line; Ctrl-C ends it with one line on stderr, also during the imports."""
    try:
        with ending_with(lambda: "Nothing was started."):
            stop_on_ctrl_c()
            keep_freed_memory()
            from gradveil.cli import main as run

            run()
    finally:
        work_is_over()


if __name__ == "__main__":
    main()
