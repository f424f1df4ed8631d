"""The routing decision: affinity, load bound, unknown prefixes, groups that go, memory."""

from __future__ import annotations

import random

import pytest

from gateway.routing.group_load import MAX_CALL_AGE_S, REPORT_DELAY_S, GroupLoad
from gateway.routing.group_picker import GroupPicker, RoutingRules
from gateway.routing.prefix_names import prefix_names, split_names
from gateway.routing.prefix_table import PrefixTable

pytestmark = pytest.mark.unit

RULES = RoutingRules(page_size=16, prefix_weight=2.0, load_bound_tokens=1000, max_names=500)
LONG = list(range(801))  # 800 tokens can be cached: fifty pages, and 48 is a boundary


def names(token_ids: list[int], salt: str = "") -> list[bytes]:
    return split_names(prefix_names(token_ids, salt, RULES.page_size))


class Cluster:
    """A picker and a clock."""

    def __init__(self, *groups: str) -> None:
        self.now = 1000.0
        self.picker: GroupPicker[str] = GroupPicker(RULES, seed=1)
        self.groups = groups
        self.picker.keep(groups)

    def best(self, token_ids: list[int], salt: str = "") -> str:
        return self.picker.rank(self.groups, names(token_ids, salt), self.now)[0]

    def send(self, token_ids: list[int], work: int, call_id: str = "c", salt: str = "") -> str:
        group = self.best(token_ids, salt)
        self.picker.begin(group, call_id, work, names(token_ids, salt), self.now)
        return group

    def load(self, group: str) -> float:
        return self.picker.load_of(group).outstanding_tokens


def test_unknown_prefixes_go_to_the_least_loaded() -> None:
    cluster = Cluster("a", "b", "c")
    for group, tokens in (("a", 300), ("b", 100), ("c", 200)):
        cluster.picker.report(group, tokens, [], cluster.now)
    assert cluster.picker.rank(cluster.groups, names(LONG), cluster.now) == ["b", "c", "a"]


def test_equal_groups_take_turns() -> None:
    cluster = Cluster("a", "b", "c")
    sent = []
    for i in range(6):
        sent.append(cluster.send([i] * 100, work=0))
        cluster.picker.end(sent[-1], "c")
    assert set(sent) == {"a", "b", "c"}
    assert sent[3:] == sent[:3]


def test_a_follow_up_returns_to_its_group() -> None:
    cluster = Cluster("a", "b")
    group = cluster.send(LONG, work=900)
    assert cluster.best([*LONG, *range(5000, 5400)]) == group
    assert cluster.best(list(range(5000, 5400))) != group


def test_another_salt_does_not() -> None:
    cluster = Cluster("a", "b")
    group = cluster.send(LONG, work=900, salt="one")
    assert cluster.best(LONG, salt="one") == group
    assert cluster.best(LONG, salt="two") != group
    assert cluster.best(LONG) != group


def test_load_outweighs_a_prefix_beyond_the_bound() -> None:
    cluster = Cluster("a", "b")
    cluster.picker.report("a", 999, names(LONG), cluster.now)
    assert cluster.best(LONG) == "a"
    cluster.picker.report("a", 1001, names(LONG), cluster.now)
    assert cluster.best(LONG) == "b"


def test_a_short_prefix_outweighs_little() -> None:
    cluster = Cluster("a", "b")
    header = LONG[:17]  # one page of 16
    cluster.picker.report("a", 31, names(header), cluster.now)
    assert cluster.best([*header, *[7] * 600]) == "a"
    cluster.picker.report("a", 33, names(header), cluster.now)
    assert cluster.best([*header, *[7] * 600]) == "b"


def test_the_longest_known_beginning_wins() -> None:
    cluster = Cluster("a", "b")
    cluster.picker.report("a", 0, names(LONG[:200]), cluster.now)
    cluster.picker.report("b", 0, names(LONG[:600]), cluster.now)
    assert cluster.best(LONG) == "b"
    cluster.picker.report("b", 1, [], cluster.now)
    assert cluster.best([*LONG[:200], *[7] * 600]) == "a"  # both have that much; a has less to do


def test_what_all_have_does_not_use_up_the_bound() -> None:
    cluster = Cluster("a", "b")
    system = list(range(9000, 10000))  # a thousand tokens, twice as many as the bound pays for
    for group in cluster.groups:
        cluster.picker.report(group, 0, names(system), cluster.now)
    cluster.picker.report("a", 500, names([*system, *LONG]), cluster.now)
    assert cluster.best([*system, *LONG]) == "a"
    assert cluster.best([*system, *[7] * 500]) == "b"


def test_a_group_that_is_gone_is_forgotten() -> None:
    cluster = Cluster("a", "b")
    group = cluster.send(LONG, work=500)
    other = "b" if group == "a" else "a"
    cluster.picker.keep([other])
    assert cluster.picker.num_names == 0
    cluster.picker.keep(["a", "b"])
    assert cluster.load(group) == 0
    cluster.picker.report(other, 1, [], cluster.now)
    assert cluster.best(LONG) == group  # as the less loaded one, not as the one that knows it
    cluster.picker.end(group, "c")  # a call of its former life
    cluster.picker.begin("nobody", "c", 5, [], cluster.now)
    cluster.picker.end("nobody", "c")


def test_a_hot_prefix_spreads_when_its_group_is_busy() -> None:
    cluster = Cluster("a", "b")
    sent = [cluster.send([*LONG[:320], *[i] * 20], work=300, call_id=str(i)) for i in range(40)]
    assert {"a", "b"} == set(sent)
    assert abs(cluster.load("a") - cluster.load("b")) <= 2 * 320 + 300


def test_old_prefixes_are_forgotten() -> None:
    cluster = Cluster("a", "b")
    cluster.picker.report("a", 1, names(LONG), cluster.now)
    cluster.now += RULES.ttl_s + 1
    assert cluster.best(LONG) == "b"


def test_memory_is_bounded_and_the_least_used_goes() -> None:
    table: PrefixTable[str] = PrefixTable(max_names=100, ttl_s=60)
    kept = names(LONG)
    rng = random.Random(0)
    for i in range(200):
        table.add(names([rng.randrange(1000) for _ in range(300)]), "a", i * 0.1)
        table.add(kept, "a", i * 0.1)
        assert len(table) <= 100
    assert table.depths(kept, 20.0) == {"a": len(kept)}


def test_the_load_between_two_reports() -> None:
    load = GroupLoad()
    load.report(1000, now=0.0)
    load.begin("x", 300, now=1.0)
    assert load.outstanding_tokens == 1300
    load.report(1200, now=1.0 + REPORT_DELAY_S)  # the report knows it
    assert load.outstanding_tokens == 1200
    load.begin("y", 50, now=1.5)
    load.report(1100, now=1.6)  # too early to know it
    assert load.outstanding_tokens == 1150
    load.end("x")
    assert load.outstanding_tokens == 850
    load.end("y")
    load.end("y")
    assert load.outstanding_tokens == 800
    assert load.num_calls == 0


def test_calls_that_share_an_id_are_counted_one_by_one() -> None:
    load = GroupLoad()
    for _ in range(3):
        load.begin("http-request", 10, now=0.0)
    load.end("http-request")
    assert (load.outstanding_tokens, load.num_calls) == (20, 2)


def test_a_call_that_was_never_sent_is_dropped_in_the_end() -> None:
    load = GroupLoad()
    load.begin("lost", 10, now=0.0)
    load.report(0, now=1.0)
    assert load.outstanding_tokens == 0
    load.report(0, now=MAX_CALL_AGE_S + 2)
    assert load.num_calls == 0
