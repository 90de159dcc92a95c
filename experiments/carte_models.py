"""Models of `carte`: with and without a base. Each also predicts every training row by a fit without it."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.numbers.adapted_base import StartingBase, products_in
from cqwen_dist.batch import pad_rows
from cqwen_dist.config.data import column_lines
from cqwen_dist.data.tokenizer import NumericalAwareTokenizer
from cqwen_dist.model.calibration import SURE
from cqwen_dist.model.ridge import robust_ridge
from cqwen_dist.prediction.table import prompts_of
from cqwen_dist.tables.baselines import ALPHAS, EncodedRows
from cqwen_dist.tables.choices import RANDOM_FEATURES, WIDE
from cqwen_dist.tables.fitting import EMPTY
from cqwen_dist.tables.rows import read_table
from experiments.wide_alone import fit_alone

TABLES = {"wine_pl": "price", "wine_dot_com_prices": "Prices", "wine_vivino_price": "Price"}
FOLDS = 5
MOST_TOKENS = 100
READ = 16  # rows at a time
COMPONENTS = 32  # of z, for trees
SHARES = (0.1, 0.3, 1.0, 3.0)  # of z beside the words, in one ridge regression
USUAL = WORDS, ONE_HOT, FOREST, BOOSTED = "ridge, words", "ridge, one-hot", "extra trees", "XGBoost"
WIDE_PART = "wide part"


class Fit(NamedTuple):
    """Predictions: for the training rows, each by a fit without it [n], and for the test rows [m]."""

    left_out: np.ndarray
    test: np.ndarray


class Rows:
    """A table's rows: as cells, prompts and tokens, and as a base's features."""

    def __init__(self, wheel: Path, name: str, base: str, out: Path, most: int) -> None:
        import pandas

        file = out / f"{name}.parquet"
        if not file.is_file():
            with zipfile.ZipFile(wheel) as files:
                whole = pandas.read_parquet(io.BytesIO(files.read(f"carte_ai/data/{name}.parquet")))
            whole.sample(min(len(whole), most), random_state=0).to_parquet(file)
        self.table = read_table(str(file), TABLES[name])
        self.y, self.base, self.file = self.table.values(), base, out / f"{name}-{Path(base).name}.npy"
        template = column_lines(self.table.columns) + f"{self.table.target}: "
        self.prompts = prompts_of(template, self.table.columns, self.table.rows, EMPTY)
        self.tokenizer = NumericalAwareTokenizer.from_pretrained(base)
        self.tokens = [*self.tokenizer.encode_batch(self.prompts)]

    def encoded(self, learnt: np.ndarray) -> EncodedRows:
        return EncodedRows(self.table, self.prompts, self.y, learnt)

    @cached_property
    def z(self) -> np.ndarray:
        """[2,n,H] of the frozen base: at the last position, which a number's head reads, and the mean over positions.

        In bf16; of longer rows the last MOST_TOKENS are read.
        """
        if self.file.is_file():
            return np.moveaxis(np.load(self.file), 1, 0)
        of, began = StartingBase(self.base, "bf16"), time.monotonic()
        found = np.empty((len(self.tokens), 2, of.width), np.float32)
        order = sorted(range(len(self.tokens)), key=lambda row: len(self.tokens[row][0]))
        for first in range(0, len(order), READ):
            some = order[first : first + READ]
            cut = [tuple(part[-MOST_TOKENS:] for part in self.tokens[row]) for row in some]
            batch = pad_rows(cut, of.tokenizer.pad_token_id, on_left=True)  # type: ignore[arg-type]
            with torch.inference_mode(), products_in("bf16", torch.device("cpu")):
                z = of.features(*batch).float()
            mean = (z * batch.mask[..., None]).sum(1) / batch.mask.sum(1, keepdim=True)
            found[some] = torch.stack([z[:, -1], mean], 1).numpy()
            if first % (20 * READ) == 0:
                print(f"{self.file.stem}: {first:,} rows, {time.monotonic() - began:.0f} s", flush=True)
        np.save(self.file, found)
        return np.moveaxis(found, 1, 0)


def kernel(x: Any, train: np.ndarray) -> np.ndarray:
    """The products [n, train] of rows x [n, columns] with the training rows."""
    found = x @ x[train].T
    return np.asarray(found if isinstance(found, np.ndarray) else found.toarray())


def kernel_ridge(products: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> tuple[Fit, float]:
    """Scikit-learn's RidgeCV on rows with these products [n, train], and its mean square when it leaves one out."""
    mean, own = y[train].mean(), products[train]
    along = own.mean(0)
    asked = products[test] - products[test].mean(1, keepdims=True) - along + along.mean()
    values, vectors = np.linalg.eigh(own - along - along[:, None] + along.mean())
    values, t, found = values.clip(0), vectors.T @ (y[train] - mean), []
    for alpha in ALPHAS:
        shrunk = values / (values + alpha)
        left = (y[train] - mean - vectors @ (shrunk * t)) / (1 - 1 / len(train) - vectors**2 @ shrunk)
        found.append((float(np.square(left).mean()), alpha, left))
    error, alpha, left = min(found, key=lambda one: one[0])
    return Fit(y[train] - left, mean + asked @ (vectors @ (t / (values + alpha)))), error


def words_of(rows: Rows, of: EncodedRows, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, Fit]:
    """The products of the rows' words and pairs, with parts of words if that is better; and the ridge regression."""
    products = [kernel(x, train) for x in (of.pairs, of.characters)]
    found = [kernel_ridge(one, rows.y, train, test) for one in products]
    best = int(found[1][1] < found[0][1])
    return products[best], found[best][0]


def trees(of: Sequence[EncodedRows], more: np.ndarray, fit: Callable[[int], Any], test: np.ndarray) -> Fit:
    """Trees on the package's encoding and further columns. of: of all training rows, then of those of all folds but one
    (without these no training row is predicted)."""

    def predicted(rows: EncodedRows, asked: np.ndarray) -> np.ndarray:
        x = np.nan_to_num(np.hstack([rows.dense, more]), nan=-1e9)
        return np.asarray(fit(len(rows.learnt)).fit(x[rows.learnt], rows.y[rows.learnt]).predict(x[asked]))

    whole, *parts = of
    left_out = np.full(len(whole.y), np.nan)
    for part in parts:
        held = np.setdiff1d(whole.learnt, part.learnt)
        left_out[held] = predicted(part, held)
    return Fit(left_out[whole.learnt], predicted(whole, test))


def forest(rows: int) -> Any:
    from sklearn.ensemble import ExtraTreesRegressor

    return ExtraTreesRegressor(100, min_samples_leaf=2, random_state=0)


def boosted(rows: int) -> Any:
    """As `baselines` has it. rows: to learn from."""
    from xgboost import XGBRegressor

    return XGBRegressor(n_estimators=300, learning_rate=0.05, min_child_weight=min(20, max(2, rows // 20)), n_jobs=1)


def wide_part(rows: Rows, train: np.ndarray, test: np.ndarray) -> tuple[Fit, Fit, np.ndarray]:
    """The product's wide part, fitted to the training rows: g, the logarithm h of the scale, and the rows' folds."""
    found = fit_alone(rows.tokenizer, rows.tokens, rows.y, train, test, WIDE, RANDOM_FEATURES)
    g, h = map(Fit, found.left_out, found.asked)
    return g, h, found.folds


def without_base(rows: Rows, train: np.ndarray, test: np.ndarray) -> dict[str, Any]:
    """The usual models by name, and the wide part's `g`, `h` and `folds`."""
    of = rows.encoded(train)
    found: dict[str, Any] = {WORDS: words_of(rows, of, train, test)[1]}
    found[ONE_HOT] = kernel_ridge(kernel(of.linear, train), rows.y, train, test)[0]
    helds = np.array_split(np.random.default_rng(0).permutation(train), FOLDS)
    parts = [of, *(rows.encoded(np.setdiff1d(train, held)) for held in helds)]
    found[FOREST], found[BOOSTED] = (trees(parts, np.empty((len(rows.y), 0)), fit, test) for fit in (forest, boosted))
    found["g"], found["h"], found["folds"] = wide_part(rows, train, test)
    return found


def with_base(rows: Rows, train: np.ndarray, test: np.ndarray, known: Mapping[str, Any]) -> dict[str, Fit]:
    """What reads z: the product's regression, by itself and behind the wide part; the words' ridge; trees."""
    of, y, g, found = rows.encoded(train), rows.y, Fit(*known["g"]), {}
    folds = torch.from_numpy(known["folds"]).long()
    last, mean = ((z - z[train].mean(0)) / (z[train].std(0) + 1e-6) for z in rows.z)
    for name, z in {"z": last, "mean z": mean}.items():
        x, rest = torch.from_numpy(z).double(), torch.from_numpy(y[train] - g.left_out)
        own = robust_ridge(x[train], torch.from_numpy(y[train]))
        more = robust_ridge(x[train], rest, folds, SURE) if len(folds) else own
        for title, one, before in ((name, own, Fit(np.zeros(1), np.zeros(1))), (f"{WIDE_PART}, {name}", more, g)):
            asked = (x[test] @ one.coefficients + one.intercept).numpy()
            found[title] = Fit(before.left_out + one.left_out.numpy(), before.test + asked)
    words, _ = words_of(rows, of, train, test)
    by_z = kernel(mean.astype(np.float64), train)
    by_z *= np.trace(words[train]) / np.trace(by_z[train])
    tried = (kernel_ridge(words + share * by_z, y, train, test) for share in SHARES)
    found[f"{WORDS}, mean z"] = min(tried, key=lambda one: one[1])[0]
    sliced = mean @ np.linalg.svd(mean[train], full_matrices=False)[2][: min(COMPONENTS, len(train) // 8)].T
    for title, fit in {FOREST: forest, BOOSTED: boosted}.items():
        found[f"{title}, mean z"] = trees([of], sliced, fit, test)
    return found
