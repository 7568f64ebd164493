"""Which guesses count as recovered: similar to the truth, and clearly more so than a blind guess."""

from torch import Tensor

RECOGNISABLE = 0.5
"""A picture can be recognisable from this SSIM to the truth."""
MORE_SSIM, MORE_PSNR = 0.02, 2.0
"""How much more SSIM, and dB of PSNR, than its blind guess a recognisable picture has.

Without these margins, chance counts: on chest X-rays, averages of other images than those of the blind guess are
above it in 15 to 35 % of 400 pictures, and with the margins in none."""

WORSE_THAN_BLIND = "worse than a blind guess"
"""The flag of a row or line whose attack would have done better to guess blindly."""

OTHER_IMAGES = "the defence draws its own batches, so the update may be of other images than those that are scored"
"""The flag of a row or line whose figures say little: the attack may be judged by images that were not used."""


def recognisable(ssim: Tensor, psnr: Tensor | None, blind_ssim: Tensor, blind_psnr: Tensor | None) -> Tensor:
    """Return which images count as recognisable: their SSIM is at least 0.5, and they are clearly above blind.

    Clearly above means `MORE_SSIM` and, if PSNR was measured, `MORE_PSNR`. An image without a guess (NaN) does not
    count.

    Args:
        ssim: of the guesses, any shape.
        psnr: of the guesses, the same shape, or None if it was not measured.
        blind_ssim: of the blind guesses.
        blind_psnr: of the blind guesses, or None if it was not measured.

    Example:
        >>> import torch
        >>> ssim, psnr = torch.tensor([0.9, 0.7, 0.4]), torch.tensor([30.0, 19.0, 30.0])
        >>> recognisable(ssim, psnr, torch.tensor(0.68), torch.tensor(18.8))
        tensor([ True, False, False])
    """
    found = (ssim >= RECOGNISABLE) & (ssim >= blind_ssim + MORE_SSIM)
    if psnr is None or blind_psnr is None:
        return found
    return found & (psnr >= blind_psnr + MORE_PSNR)
