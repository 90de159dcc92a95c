"""The core works without its wings: what a missing one brings is refused in one line."""

import sys
from pathlib import Path

import pytest
from support.tiny import random_batch, tiny_model

from cqwen_dist import api
from cqwen_dist.config import UserError
from cqwen_dist.heads.beside import Beside
from cqwen_dist.model.calibration import calibrate
from cqwen_dist.wings import PLACES, from_wing


def test_every_place_in_a_wing_exists() -> None:
    assert not [name for name in PLACES if not callable(from_wing(name))]


def test_a_run_ends_without_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cqwen_dist.tools.report", None)
    monkeypatch.delitem(sys.modules, "cqwen_dist.tools.report.html", raising=False)
    with api._leaving_pages(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_model_with_a_wide_part_needs_the_wing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Beside, "__subclasses__", list)
    monkeypatch.setitem(sys.modules, "cqwen_dist.tables", None)
    monkeypatch.delitem(sys.modules, "cqwen_dist.tables.wide", raising=False)
    monkeypatch.delitem(sys.modules, "cqwen_dist.tables.wide.wide_part", raising=False)
    with pytest.raises(UserError, match=r"model\.wide: found no cqwen_dist\.tables here"):
        tiny_model(wide=64, number_dims=2)
    tiny_model(number_dims=2)


def test_a_wide_part_is_read_without_scipy_and_fitted_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model(wide=64, number_dims=2), random_batch()
    for name in ("wide_start", "wide_spread", "wide_rows"):
        monkeypatch.delitem(sys.modules, f"cqwen_dist.tables.wide.{name}", raising=False)
    for name in ("scipy", "scipy.linalg", "scipy.sparse"):
        monkeypatch.setitem(sys.modules, name, None)
    model.kept_features(batch, batch.kept)
    said = r"start of model\.wide: found no scipy\S* here, allowed: pip install 'cqwen-dist\[tables\]'"
    with pytest.raises(UserError, match=said):
        calibrate(model, [batch])
