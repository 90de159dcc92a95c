"""One real SLURM cluster for all tests marked `cluster`: three nodes, two for a run and a spare."""

from collections.abc import Iterator

import pytest
from support.slurm_cluster import Cluster, why_not


@pytest.fixture(scope="session")
def three_nodes() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no SLURM cluster here: {reason}")
    cluster = Cluster(3)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(three_nodes: Cluster) -> Iterator[Cluster]:
    """The cluster, every node idle; afterwards no job of the test is left."""
    three_nodes.mend()
    yield three_nodes
    three_nodes.slurm("scancel", "--user=root", "--full", check=False)
    three_nodes.mend()
