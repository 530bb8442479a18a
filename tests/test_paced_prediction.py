"""What the prediction of paced ranks adds to the simulator: when a rank notices, and what the draft says."""

from __future__ import annotations

from headrace.run.types import Choice, Row
from paced_prediction import SILENCES, Drafted, Ear, Ways, Written


def test_a_learned_silence_is_heard_at_once_and_a_longer_one_late() -> None:
    ear = Ear(Ways([[0.0]] * len(SILENCES)))
    late = []
    for _ in range(12):
        came = ear.moved + 0.025
        ear.heard(ear.hears(came, busy=False))
        late.append(ear.moved - came)
    assert late[0] > 1e-4 and late[-1] < 1e-9
    came = ear.moved + 0.25
    last = ear.hears(came, busy=False)
    assert 1e-4 < last - came <= 0.25 / 64
    assert ear.hears(came - 0.1, busy=True) == last, "nothing overtakes"


def test_texts_are_followed_by_their_tokens_only_on_the_text() -> None:
    written = Written(1, [5, 6, 7])
    assert written.choice(0, Row(0, 1, 6, 0, True)).token == 7
    assert written.choice(0, Row(0, 1, 9, 0, True)).token == 0


def test_the_draft_is_asked_for_what_stands_on_the_guesses_before() -> None:
    class Asked:
        text = (5, 6, 7)

        def after(self, at: int, path: tuple[int, ...]) -> Choice:
            return Choice(0, at, -0.5, tuple((token, -1.0) for token in path))

    drafted = Drafted(1, Asked())  # type: ignore[arg-type]
    drafted.tokens = {3: 6, 4: 9}
    said = drafted.choice(2, Row(0, 3, 8, 5, True, True, (3, 4)))
    assert (said.row, said.token, [token for token, _ in said.top]) == (2, 0, [6, 9, 8])
