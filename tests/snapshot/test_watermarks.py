"""A subtask's event time, by what its channels say of theirs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from snapshot.barriers.barrier import EndOfInput, Idle, Watermark
from snapshot.barriers.channel_watermarks import END_MS, START_MS, Watermarks

IDLE, BACK, END = Idle(idle=True), Idle(idle=False), EndOfInput()


def at(ms: int) -> Watermark:
    return Watermark(at_ms=ms)


def test_it_is_the_smallest_and_known_only_when_every_channel_has_said_one() -> None:
    marks = Watermarks(2)
    assert marks.take(0, at(50)) == []
    assert marks.at_ms == START_MS
    assert marks.take(1, at(30)) == [at(30)]
    assert marks.take(0, at(60)) == []
    assert marks.take(1, at(80)) == [at(60)]


def test_it_never_goes_back() -> None:
    marks = Watermarks(1)
    marks.take(0, at(50))
    assert marks.take(0, at(40)) == []
    assert marks.take(0, at(50)) == []
    assert marks.at_ms == 50


def test_an_idle_channel_is_left_out_and_holds_it_when_it_is_back() -> None:
    marks = Watermarks(2)
    marks.take(0, at(50))
    assert marks.take(1, IDLE) == [at(50)]
    marks.take(0, at(90))
    assert marks.take(1, BACK) == []
    assert marks.take(0, at(200)) == []
    assert marks.at_ms == 90
    assert marks.take(1, at(100)) == [at(100)]


def test_a_watermark_says_that_the_channel_is_not_idle() -> None:
    marks = Watermarks(1)
    assert marks.take(0, IDLE) == [IDLE]
    assert marks.take(0, at(5)) == [BACK, at(5)]


def test_it_is_idle_when_all_are() -> None:
    marks = Watermarks(2)
    assert marks.take(0, IDLE) == []
    assert not marks.is_idle
    assert marks.take(1, IDLE) == [IDLE]
    assert marks.is_idle
    assert marks.take(0, IDLE) == []
    assert marks.take(0, BACK) == [BACK]


def test_a_channel_that_has_ended_holds_nothing_and_the_last_one_is_the_end_of_time() -> None:
    marks = Watermarks(2)
    marks.take(0, at(10))
    assert marks.take(1, END) == [at(10)]
    assert marks.take(0, END) == [at(END_MS)]
    assert not marks.is_idle
    assert marks.take(0, at(20)) == []


def test_an_idle_channel_beside_ended_ones_keeps_the_end_of_time_back() -> None:
    marks = Watermarks(2)
    marks.take(0, at(10))
    marks.take(1, IDLE)
    assert marks.take(0, END) == [IDLE]
    assert marks.at_ms == 10
    assert marks.take(1, at(20)) == [BACK, at(20)]


def test_after_a_restore_it_stands_where_it_stood() -> None:
    marks = Watermarks(1, at_ms=70)
    assert marks.at_ms == 70
    assert marks.take(0, at(60)) == []
    assert marks.take(0, at(80)) == [at(80)]


EVENTS = st.one_of(
    st.builds(at, st.integers(0, 20)), st.sampled_from([IDLE, BACK]), st.just(EndOfInput())
)


@given(st.lists(st.tuples(st.integers(0, 2), EVENTS), max_size=40))
def test_what_is_said_onward_rises_and_says_idle_in_turns(
    told: list[tuple[int, Watermark | Idle | EndOfInput]],
) -> None:
    marks = Watermarks(3)
    before_ms, idle = START_MS, False
    for channel, event in told:
        for said in marks.take(channel, event):
            if isinstance(said, Watermark):
                assert said.at_ms > before_ms
                assert not idle
                before_ms = said.at_ms
            else:
                assert said.idle is not idle
                idle = said.idle
        assert marks.at_ms == before_ms
        assert marks.is_idle is idle


def test_the_end_of_time_waits_for_an_idle_channel_that_may_have_rows_yet() -> None:
    marks = Watermarks(2)
    marks.take(0, at(5))
    marks.take(1, IDLE)
    assert marks.take(0, at(END_MS)) == []
    assert marks.take(0, END) == [IDLE]
    assert marks.take(1, at(7)) == [BACK, at(7)]
    assert marks.take(1, END) == [at(END_MS)]
