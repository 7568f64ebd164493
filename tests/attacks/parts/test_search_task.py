import torch

from gradveil.attacks.parts.search_task import SearchTask, added


def task(scale, later=()):
    statistics = {"norm": (scale * torch.ones(3, 2), scale * torch.zeros(3, 2))}
    return SearchTask({"w": scale * torch.arange(6.0).view(3, 2)}, statistics, None, {"key": torch.ones(3, 1)}, later)


def test_a_task_is_rebuilt_from_its_tensors_with_those_of_later_rounds():
    whole = task(1.0, (task(2.0), task(3.0)))
    again = whole.with_tensors(whole.tensors)
    assert [round_.wanted["w"].tolist() for round_ in (again, *again.later)] == [
        (scale * torch.arange(6.0).view(3, 2)).tolist() for scale in (1.0, 2.0, 3.0)
    ]
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors, again.tensors, strict=True))


def test_rows_and_labels_are_chosen_in_all_rounds():
    some = task(1.0, (task(2.0),)).of(torch.tensor([2, 0])).labelled(torch.tensor([[7], [8]]))
    assert some.rows == some.later[0].rows == 2
    assert some.later[0].wanted["w"].tolist() == [[8.0, 10.0], [0.0, 2.0]]
    assert some.labels.tolist() == some.later[0].labels.tolist() == [[7], [8]]


def test_gradients_add_up():
    assert added([{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -2.0])}])["w"].tolist() == [4.0, 0.0]
