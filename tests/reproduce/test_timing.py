from gradveil.reproduce.timing import overhead, round_seconds, seconds_in_turns


class Recorded:
    """A simulation that records when it plays a round."""

    def __init__(self, name, diary, seconds):
        self.name, self.diary, self.seconds = name, diary, seconds

    def step(self, number):
        self.diary.append((number, self.name))
        return {"seconds": self.seconds * number}, None


def test_every_round_starts_with_another_simulation():
    diary, heard = [], []
    runs = {name: Recorded(name, diary, seconds) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0))}
    found = seconds_in_turns(runs, 3, heard.append)
    assert found == {"a": [1.0, 2.0, 3.0], "b": [2.0, 4.0, 6.0], "c": [4.0, 8.0, 12.0]}
    assert "".join(name for _, name in diary) == "bca" + "cab" + "abc"
    assert [number for number, _ in diary] == [1] * 3 + [2] * 3 + [3] * 3
    assert heard == [1 / 3, 2 / 3, 1.0]


def test_overhead_is_the_ratio_of_the_times_beside_it():
    ours, plain = [9.0, 2.0, 3.0, 2.2], [1.0, 1.0, 1.0, 2.0]
    assert overhead(ours, plain) == round_seconds(ours) / round_seconds(plain) == 2.2


def test_overhead_leaves_out_the_first_round_unless_it_is_the_only_one():
    assert overhead([9.0, 2.0, 2.0], [1.0, 1.0, 1.0]) == 2.0
    assert overhead([9.0], [3.0]) == 3.0
