"""Which request gets which fault: decided by the seed and by nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.drill import (
    Calm,
    Chance,
    Facts,
    Fault,
    FirstOf,
    Kind,
    Rule,
    Script,
    Verb,
    Weather,
    draw,
    group_of,
    stormy,
)
from recovery.drill.proxy.s3_requests import READS, WRITES, classify
from statebackend.errors import SettingError


def facts(number: int = 1, verb: Verb = Verb.PUT, key: str = "log/1", nth: int = 1) -> Facts:
    return Facts(number=number, verb=verb, key=key, group=group_of(key), nth=nth)


# --- draws and weather ---------------------------------------------------------------------------


@given(seed=st.integers(), number=st.integers(1), verb=st.sampled_from(Verb))
def test_a_draw_is_from_0_to_below_1_and_the_same_every_time(
    seed: int, number: int, verb: Verb
) -> None:
    drawn = draw(seed, number, verb)
    assert 0 <= drawn < 1
    assert draw(seed, number, verb) == drawn


def test_draws_are_the_same_on_every_machine_and_in_every_release() -> None:
    # A seed that someone wrote down must still mean the same drill: never change these.
    assert draw(1, 1, Verb.PUT) == 0.14497679615771897
    assert draw(7, 123, Verb.LIST, "fraction") == 0.4485774614491964


@given(seed=st.integers(0, 2**32), number=st.integers(1, 10**6), verb=st.sampled_from(Verb))
def test_weather_decides_the_same_for_the_same_seed_and_facts(
    seed: int, number: int, verb: Verb
) -> None:
    decided = stormy(0.5).decide(facts(number, verb), seed=seed)
    assert stormy(0.5).decide(facts(number, verb), seed=seed) == decided


@pytest.mark.parametrize("verb", [Verb.PUT_IF, Verb.GET, Verb.LIST, Verb.DELETE])
def test_weather_strikes_its_share_of_every_verb(verb: Verb) -> None:
    plan = stormy(0.2)
    struck = Counter(
        fault.kind
        for number in range(1, 5001)
        if (fault := plan.decide(facts(number, verb), seed=3)) is not None
    )
    assert 0.17 < struck.total() / 5000 < 0.23
    # None of its kinds is rare.
    assert min(struck.values()) > struck.total() / len(struck) * 0.6


def test_weather_gives_each_verb_only_what_can_strike_it() -> None:
    plan = stormy(1.0)

    def kinds(verb: Verb) -> set[Kind]:
        found = (plan.decide(facts(number, verb), seed=5) for number in range(1, 300))
        return {fault.kind for fault in found if fault is not None}

    anywhere = {Kind.STATUS, Kind.DROP_BEFORE, Kind.LOSE_ANSWER}
    for verb in WRITES:
        assert kinds(verb) == anywhere | {Kind.DROP_IN_REQUEST, Kind.DUPLICATE}
    for verb in READS:
        assert kinds(verb) == anywhere | {Kind.TRUNCATE}
    assert kinds(Verb.DELETE) == anywhere


def test_weather_strikes_bodies_in_different_places() -> None:
    plan = Weather(Chance(fault=Fault.truncate(), share=1.0))
    found = [plan.decide(facts(number), seed=1) for number in range(1, 50)]
    assert len({fault.fraction for fault in found if fault is not None}) == 49


def test_weather_may_strike_where_a_fault_says() -> None:
    plan = Weather(Chance(fault=Fault.truncate(0.0), share=1.0, anywhere=False))
    found = [plan.decide(facts(number), seed=1) for number in range(1, 50)]
    assert found == [Fault.truncate(0.0)] * 49


def test_a_storm_cuts_bodies_anywhere_and_often_before_their_first_byte() -> None:
    found = [stormy(1.0).decide(facts(number, Verb.LIST), seed=7) for number in range(1, 2001)]
    fractions = [fault.fraction for fault in found if fault and fault.kind is Kind.TRUNCATE]
    assert 0.4 < fractions.count(0.0) / len(fractions) < 0.6
    assert len(set(fractions)) > 100


def test_seeds_differ() -> None:
    plan = stormy(0.5)
    rows = [
        tuple(plan.decide(facts(number), seed=seed) for number in range(1, 30)) for seed in range(9)
    ]
    assert len(set(rows)) == 9


def test_chances_over_1_are_refused() -> None:
    with pytest.raises(SettingError, match="add up to"):
        Weather(
            Chance(fault=Fault.refuse(), share=0.6),
            Chance(fault=Fault.hold(), share=0.6, verbs=frozenset({Verb.PUT})),
        )


# --- scripts -------------------------------------------------------------------------------------


def test_the_third_put_of_the_log_loses_its_answer() -> None:
    script = Script(
        Rule(fault=Fault.lose_answer(), verbs={Verb.PUT_IF}, group="log/", nth={3}),
    )
    decided = [script.decide(facts(verb=Verb.PUT_IF, nth=nth), seed=0) for nth in range(1, 5)]
    assert decided == [None, None, Fault.lose_answer(), None]
    assert script.decide(facts(verb=Verb.PUT, nth=3), seed=0) is None
    assert script.decide(facts(verb=Verb.PUT_IF, key="data/1", nth=3), seed=0) is None


def test_the_first_rule_that_matches_decides_even_if_it_spares() -> None:
    script = Script(
        Rule(fault=None, key=lambda key: key.endswith("7")),
        Rule(fault=Fault.refuse(409, "ConditionalRequestConflict"), nth=range(1, 3)),
    )
    assert script.decide(facts(key="log/7"), seed=0) is None
    assert script.decide(facts(key="log/8"), seed=0) == Fault.refuse(
        409, "ConditionalRequestConflict"
    )
    assert script.decide(facts(key="log/8", nth=3), seed=0) is None


def test_of_several_plans_the_first_fault_is_taken() -> None:
    plan = FirstOf(
        Calm(), Script(Rule(fault=Fault.hold(), nth={1})), Script(Rule(fault=Fault.refuse()))
    )
    assert plan.decide(facts(nth=1), seed=0) == Fault.hold()
    assert plan.decide(facts(nth=2), seed=0) == Fault.refuse()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault.truncate(1.0),
        lambda: Fault.refuse(200),
        lambda: Fault.duplicate(3),
        lambda: Fault.stall(-1),
        lambda: Fault.slow(0),
    ],
)
def test_a_fault_that_cannot_be_is_refused(make: object) -> None:
    with pytest.raises(SettingError, match="refused"):
        make()  # type: ignore[operator]


# --- what a request asks for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "headers", "expected"),
    [
        ("GET", "/b/job/log/1.ckpt", {}, (Verb.GET, "job/log/1.ckpt")),
        ("GET", "/b/k?versionId=1&X-Amz-Signature=secret", {}, (Verb.GET, "k")),
        ("HEAD", "/b/data/gr%C3%B6%C3%9Fe%20%2B1%252", {}, (Verb.HEAD, "data/größe +1%2")),
        ("PUT", "/b/k", {}, (Verb.PUT, "k")),
        ("PUT", "/b/k?x-id=PutObject", {"if-none-match": "*"}, (Verb.PUT_IF, "k")),
        ("PUT", "/b/k", {"if-match": '"e"'}, (Verb.PUT_IF, "k")),
        ("PUT", "/b/k", {"x-amz-copy-source": "/b/x"}, (Verb.COPY, "k")),
        ("DELETE", "/b/k", {}, (Verb.DELETE, "k")),
        ("POST", "/b?delete", {}, (Verb.DELETE_MANY, "")),
        ("POST", "/b/?delete=", {}, (Verb.DELETE_MANY, "")),
        ("GET", "/b?list-type=2&prefix=job%2Flog%2F", {}, (Verb.LIST, "job/log/")),
        ("GET", "/b/", {}, (Verb.LIST, "")),
        ("GET", "/b?location", {}, (Verb.OTHER, "")),
        ("GET", "/", {}, (Verb.OTHER, "")),
        ("PUT", "/b", {}, (Verb.OTHER, "")),
        ("HEAD", "/b", {}, (Verb.OTHER, "")),
        ("POST", "/b/k?uploads", {}, (Verb.UPLOAD_CREATE, "k")),
        ("PUT", "/b/k?partNumber=1&uploadId=u", {}, (Verb.UPLOAD_PART, "k")),
        ("POST", "/b/k?uploadId=u", {}, (Verb.UPLOAD_COMPLETE, "k")),
        ("DELETE", "/b/k?uploadId=u", {}, (Verb.UPLOAD_ABORT, "k")),
        ("GET", "/b/k?uploadId=u", {}, (Verb.OTHER, "k")),
        ("PUT", "/b/k?tagging", {}, (Verb.OTHER, "k")),
    ],
)
def test_requests_are_known_by_what_they_ask(
    method: str, target: str, headers: dict[str, str], expected: tuple[Verb, str]
) -> None:
    assert classify(method, target, headers.get) == expected


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("log/1", "log/"),
        ("team/data/clicks/log/1", "log/"),
        ("clicks/base/i1/log/000012.sst", "log/"),
        ("clicks/base/i1/000012.sst", "base/"),
        ("log", ""),
        ("clicks/log/", "log/"),
        ("catalog/1", ""),
    ],
)
def test_a_keys_group_is_its_last_known_folder(key: str, group: str) -> None:
    assert group_of(key) == group
