"""Named numbers that a hook records about its own work: how much it replaced, how far it moved, what it clipped."""

from collections.abc import Mapping

from gradveil.errors import DefenceError


class Reports:
    """The numbers recorded in one client's round. A number that is recorded several times becomes a weighted mean.

    They are computed from private data, so they are private too. A simulation puts their means over the round's clients
    into its rows. A real site keeps them unless its own configuration says otherwise (docs/flower.md). Recording draws
    no random numbers and changes no result.

    Args:
        declared: the names that may be recorded, each with one line of help; None allows every name.

    Example:
        >>> reports = Reports({"clipped": "share of clipped examples"})
        >>> reports.add("clipped", 1.0, weight=3)
        >>> reports.add("clipped", 0.0)
        >>> reports.means()
        {'clipped': 0.75}
    """

    def __init__(self, declared: Mapping[str, str] | None = None) -> None:
        self._declared = declared
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Record a number. Raise `DefenceError` if the defence did not declare its name."""
        if self._declared is not None and name not in self._declared:
            known = ", ".join(self._declared) or "none"
            raise DefenceError(
                f"A reported number must be declared by the defence, got {name!r}; declared: {known}. "
                f"Add {name!r} with a line of help to the class's `reports`."
            )
        total, weights = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (total + float(value) * weight, weights + weight)

    def means(self) -> dict[str, float]:
        """Return the mean of each recorded number, by name; a number whose weights sum to 0 is left out."""
        return {name: total / weights for name, (total, weights) in self._sums.items() if weights}


def mean_over_clients(reports: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the clients that reported it.

    Example:
        >>> mean_over_clients([{"a": 1.0}, {"a": 2.0, "b": 5.0}, {}])
        {'a': 1.5, 'b': 5.0}
    """
    names = dict.fromkeys(name for each in reports for name in each)
    found = {name: [each[name] for each in reports if name in each] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
