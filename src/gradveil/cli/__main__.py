"""``python -m gradveil.cli`` is the same as ``gradveil``."""

from gradveil.cli import main
from gradveil.interrupts import stop_on_ctrl_c, work_is_over

if __name__ == "__main__":
    stop_on_ctrl_c()
    try:
        main()
    finally:
        work_is_over()
