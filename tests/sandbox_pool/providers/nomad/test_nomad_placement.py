"""Why there is no room, in one sentence."""

import pytest

from sandbox_pool.providers.nomad.nomad_watch import placement_problem
from support.nomad_recorded import recorded


def evaluation(index=1, **metric):
    return {"CreateIndex": index, "Status": "complete", "FailedTGAllocs": {"host": metric} if metric else None}


def test_a_recorded_refusal_names_the_resource():
    assert placement_problem(recorded("evaluations_full")) == "memory is exhausted on 1 node"


def test_a_recorded_placement_is_no_problem():
    assert placement_problem(recorded("evaluations")) == ""


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ({"DimensionExhausted": {"cpu": 2, "memory": 1}}, "cpu is exhausted on 2 nodes; memory is exhausted on 1 node"),
        ({"ConstraintFiltered": {"${attr.x} = y": 3}}, "the constraint `${attr.x} = y` leaves out 3 nodes"),
        ({"QuotaExhausted": ["cpu"], "NodesEvaluated": 1}, "the quota cpu is used up"),
        ({"NodesEvaluated": 0, "NodesAvailable": {"dc1": 2}}, "no node is eligible (datacenters with nodes: dc1)"),
        ({"NodesEvaluated": 0, "NodesAvailable": None}, "no node is eligible (datacenters with nodes: none)"),
        ({"NodesEvaluated": 4}, "none of 4 nodes would do"),
    ],
)
def test_every_kind_of_refusal_is_put_into_words(metric, said):
    assert placement_problem([evaluation(**metric)]) == said


def test_the_newest_word_counts():
    old, new = evaluation(1, DimensionExhausted={"cpu": 1}), evaluation(2, DimensionExhausted={"memory": 1})
    assert placement_problem([old, new]) == placement_problem([new, old]) == "memory is exhausted on 1 node"
