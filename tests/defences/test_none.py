import torch

from gradveil.defences import HOOKS, build_defence
from gradveil.types import Update


def test_none_asks_for_no_hook_and_sends_the_update_as_it_is():
    none = build_defence("none")
    assert not any(none.overrides(hook) for hook in HOOKS)
    update = Update({"w": torch.ones(2)}, 1)
    assert none.on_update(update, None) is update
