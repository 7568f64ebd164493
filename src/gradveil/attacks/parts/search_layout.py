r"""The layout of a row of search variables: which columns hold images, labels, decoys and secret outputs.

A search varies one row of numbers per target and restart. A row is laid out as::

    [ images | labels | decoy images | decoy labels | output of a secret module | ... ]

``images`` are the pixels of B images, or the numbers that a generator makes images from. Each later part is there only
if it is searched: logits of soft labels, the images that a defence mixes in with their labels, and the unknown outputs
of modules that stay on the client.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

IMAGES, LABELS, DECOYS, DECOY_LABELS = "images", "labels", "decoy images", "decoy labels"


@dataclass(frozen=True)
class SearchLayout:
    """Named slices of a row of search variables.

    Attributes:
        sizes: the number of variables in each part, by name, in the order of the row.

    Example:
        >>> layout = SearchLayout({IMAGES: 4, LABELS: 2})
        >>> layout.slice_of(LABELS), layout.size, DECOYS in layout
        (slice(4, 6, None), 6, False)
    """

    sizes: Mapping[str, int]

    @property
    def size(self) -> int:
        """The number of variables in a row."""
        return sum(self.sizes.values())

    def __contains__(self, name: str) -> bool:
        """Return whether the part is searched."""
        return name in self.sizes

    def slice_of(self, name: str) -> slice:
        """Return the columns of a part."""
        names = list(self.sizes)
        start = sum(self.sizes[before] for before in names[: names.index(name)])
        return slice(start, start + self.sizes[name])

    def part(self, flat: Tensor, name: str) -> Tensor:
        """Return one part (rows, numbers) of the variables (rows, size), as a view."""
        return flat[:, self.slice_of(name)]


def output_of(module: str) -> str:
    """Return the name of the part that holds a secret module's output."""
    return f"output of {module}"
