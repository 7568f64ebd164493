import torch

from gradveil.data import load_dataset
from gradveil.data.federated import federate


def test_a_device_holds_only_the_images_of_its_client():
    data = federate(load_dataset("mnist-5k"), "iid:images=5", 3, "1:0/3", 0)
    alone = data.only(1, 1, 3)
    assert alone.sizes == [0, 5, 0]
    assert len(alone.train) == 5
    for one, other in ((data.client(1), alone.client(1)), (data.images("own", 1, 0, 9), alone.images("own", 1, 0, 9))):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.sensitive, other.sensitive)
    assert (data.only(0, 0, 3).count("sensitive", None), alone.count("sensitive", None)) == (0, 2)
    assert data.only(1, 4, 5).sizes == [0, 0, 0, 0, 5]
