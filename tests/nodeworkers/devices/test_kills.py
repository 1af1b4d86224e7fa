"""That the rig which watches kills sees what it is there for: devices away, slices half written, one in two pods."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

from benchmarks import device_kills
from benchmarks.report import Report
from nodeworkers.devices.holdings import Claimed, Holding, Listed
from tests.nodeworkers.devices.kills import DRA, PLUGIN, Look, Seen, Watch, away, offered
from tests.nodeworkers.devices.whole import GPU, Machine


def look(time: float, *whole: str, who: Listed | None = None) -> Look:
    return Look(time, frozenset(whole), who)


def test_how_long_devices_were_away() -> None:
    looks = [look(9, PLUGIN), look(10.5), look(11, DRA), look(12, PLUGIN, DRA), look(14, PLUGIN), look(17, DRA, PLUGIN)]
    assert away(looks, PLUGIN, 10, 18) == 2, "from when both ran, whatever was before"
    assert away(looks, DRA, 10, 13) == 1
    assert away(looks, DRA, 10, 18) == 5, "a later loss counts as well, from when they were last there"
    assert away(looks, PLUGIN, 13, 30) == 1 and away(looks, DRA, 12.5, 16) == 3.5
    assert away([], DRA, 10, 18) == 8


def sliced(*devices: dict[str, Any], generation: int = 1, count: int = 1) -> dict[str, Any]:
    pool = {"name": "node-1", "generation": generation, "resourceSliceCount": count}
    return {"spec": {"pool": pool, "devices": list(devices)}}


def test_slices_count_as_the_scheduler_has_them() -> None:
    well = {"name": "a", "attributes": {"resource": {"string": GPU}}}
    ill = {**well, "name": "b", "taints": [{"key": "k"}]}
    assert offered([]) == {}
    assert offered([sliced(well, ill)]) == {GPU: 1}
    assert offered([sliced(well, count=2), sliced(well, count=2)]) == {GPU: 2}
    assert offered([sliced(well, count=2)]) == {}, "a slice is still missing"
    assert offered([sliced(well, well, generation=1), sliced(well, generation=2)]) == {GPU: 1}


def test_a_device_in_two_pods_is_seen_whichever_way_they_got_it() -> None:
    watch = Watch(cast(Machine, None))
    twice = Listed((Holding("default", "one", "c", "r", "x"), Holding("default", "one", "d", "r", "x")))
    watch.looks = [look(1), look(2, who=twice)]
    assert not watch.doubled(), "containers of one pod may share"
    watch.looks.append(look(3, who=Listed(twice.devices, (Claimed("default", "two", "c", "x", "uid"),))))
    assert watch.doubled() == ["x: ['one', 'two']"]


def test_the_benchmark_tells_of_kills_and_of_memory() -> None:
    report = Report("")
    after = {("kubelet", DRA): [2.5, 3.0, 1.0]}
    seen = Seen({("kubelet", DRA): [0.2, 1.0, 0.4]}, cast(Any, after), ended=7, unsaved=1, looks=40, trouble=["p: why"])
    device_kills.tell(seen, report)
    assert report.rows[0][:2] == ("kubelet killed, devices by dra away", "0.4 / 1.0 s")
    assert report.rows[0][2].endswith("From the kill on 2.5 / 3.0")
    assert report.values["failed"] == 1 and report.values["pods"] == 7 and report.values["doubled"] == 0
    device_kills.tell_memory(cast(Any, SimpleNamespace(pid=lambda name: os.getpid())), "at rest", report)
    told = report.values["memory at rest"]
    assert told["processes"] >= 1 and told["rss"] >= told["own_rss"] > 0 and told["pss"] >= told["own_pss"] > 0
