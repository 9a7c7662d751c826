"""Cases for columns, as plain data: what TensorFlow made of them is in `columns.json`, see `record_tensorflow.py`."""

from __future__ import annotations

import hashlib

import numpy as np

BUCKETS = 100_003
COUNT = 10_000
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz0123456789_-",
    "абвгдежзийклмнопрстуфхцчшщъыьэюя",
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去",
    "あいうえおかきくけこアイウエオ",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "अआइईउऊऋएऐओऔकखगघङ",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "😀😁😂🤣🚀🌍é ß\t\n",
    "\x00\x01\x7f",
]


def strings():
    """10,000 strings in UTF-8, and raw bytes among them, of all lengths from 0 to 300 and some longer."""
    draw = np.random.default_rng(20)
    made = []
    for number in range(COUNT):
        length = number % 301 if number < 6000 else int(draw.integers(0, 40)) if number < 9900 else 1000 + 13 * number
        if number % 5 == 0:
            made.append(draw.integers(0, 256, min(length, 2000), dtype=np.uint8).tobytes())
            continue
        alphabet = ALPHABETS[number % len(ALPHABETS)]
        text = "".join(alphabet[place] for place in draw.integers(0, len(alphabet), min(length, 2000)))
        made.append(text.encode()[: min(length, 2000)])
    return made


def values_of(name, shape):
    """A variable's values, drawn from its name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def halved(value):
    return value / 2 - 1


def doubled(value):
    return value * 2


NORMALIZERS = {"halved": halved, "doubled": doubled}


def ragged(kind, *rows):
    return {"kind": kind, "rows": [list(row) for row in rows]}


def numeric(key="x", **options):
    return {"make": "numeric_column", "key": key, **options}


def bucketized(boundaries, key="x", **options):
    return {"make": "bucketized_column", "source_column": numeric(key, **options), "boundaries": boundaries}


def identity(key="id", count=5, **options):
    return {"make": "categorical_column_with_identity", "key": key, "num_buckets": count, **options}


def hashed(key="word", size=7, **options):
    return {"make": "categorical_column_with_hash_bucket", "key": key, "hash_bucket_size": size, **options}


def listed(words, key="word", **options):
    return {"make": "categorical_column_with_vocabulary_list", "key": key, "vocabulary_list": words, **options}


def filed(lines, key="word", **options):
    return {
        "make": "categorical_column_with_vocabulary_file", "key": key, "vocabulary_file": {"lines": lines}, **options,
    }  # fmt: skip


def crossed(keys, size=11, **options):
    return {"make": "crossed_column", "keys": keys, "hash_bucket_size": size, **options}


def weighted(column, key="weight"):
    return {"make": "weighted_categorical_column", "categorical_column": column, "weight_feature_key": key}


def indicator(column):
    return {"make": "indicator_column", "categorical_column": column}


def embedded(column, dimension=3, **options):
    return {"make": "embedding_column", "categorical_column": column, "dimension": dimension, **options}


def shared(columns, dimension=3, **options):
    return {"make": "shared_embedding_columns", "categorical_columns": columns, "dimension": dimension, **options}


X = [-1.5, 0.0, 0.999999, 1.0, 3.5, 1e9]
IDS = [0, 4, -1, 2]
LISTS = ragged("int", [0, 4, 4], [], [1], [2, 3])
WORDS = ["Oslo", "", "東京", "köln"]
WORD_LISTS = ragged("str", ["a", "b", "a"], [], ["", "Oslo"], ["ü" * 40])
WEIGHTS = ragged("float", [0.5, 2.0, 1.0], [], [3.0], [0.25, 4.0])
ODD_WEIGHTS = ragged("float", [0.5, -2.0, 0.0], [], [-3.0], [0.25, 4.0])
TEXT = "Oslo\nRoma\r\n東京\nköln\n"


def inputs(features, *columns):
    return {"layer": "input_layer", "features": features, "columns": list(columns)}


def linear(features, *columns, **options):
    return {"layer": "linear_model", "features": features, "columns": list(columns), "options": options}


CASES = {
    "numeric": inputs({"x": X}, numeric()),
    "numeric of a shape": inputs({"x": [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]}, numeric(shape=[2, 2])),
    "numeric, normalised": inputs({"x": X}, numeric(normalizer_fn="halved")),
    "numeric, whole numbers normalised": inputs(
        {"x": [3, 4]}, numeric(dtype="int64", normalizer_fn="doubled", default_value=7)
    ),
    "numeric, defaults": inputs({"x": [[1.0, 2.0]]}, numeric(shape=[2], default_value=[0.5, 1.5])),
    "several, by name": inputs(
        {"x": [1.0, 2.0], "a": [3.0, 4.0], "id": [1, 0]}, numeric(), indicator(identity(count=2)), numeric("a")
    ),
    "buckets at their edges": inputs({"x": X}, bucketized([0.0, 1.0, 3.5])),
    "buckets of edges, rounded": inputs({"x": [0.1, 0.2, 0.3, 16777217.0]}, bucketized([0.1, 0.3, 16777217])),
    "buckets of several numbers": inputs({"x": [[0.5, 7.0], [1.0, -3.0]]}, bucketized([0, 1], shape=[2])),
    "buckets, embedded": inputs({"x": [[0.5, 7.0], [1.0, -3.0]]}, embedded(bucketized([0, 1], shape=[2]))),
    "buckets, linear": linear({"x": [[0.5, 7.0], [1.0, -3.0]]}, bucketized([0, 1], shape=[2])),
    "identity": inputs({"id": IDS}, indicator(identity())),
    "identity, two an example": inputs({"id": [[0, 4], [-1, 2], [3, 3], [-1, -1]]}, indicator(identity())),
    "identity, outside": inputs({"id": [0, 9, -1, -7]}, indicator(identity(default_value=3))),
    "identity, lists outside": inputs(
        {"id": ragged("int", [0, 9], [], [-1, -7])}, indicator(identity(default_value=3))
    ),
    "identity, lists": inputs({"id": LISTS}, indicator(identity())),
    "hashed": inputs({"word": WORDS}, indicator(hashed())),
    "hashed lists": inputs({"word": WORD_LISTS}, indicator(hashed())),
    "hashed, two an example": inputs({"word": [["a", "b"], ["", "c"]]}, indicator(hashed())),
    "hashed numbers": inputs(
        {"id": [0, -1, -12, 2**62, 987654321]}, indicator(hashed("id", 13, dtype="int64"))
    ),
    "hashed lists of numbers": inputs({"id": ragged("int", [-1, 10], [7])}, indicator(hashed("id", dtype="int64"))),
    "vocabulary": inputs({"word": WORDS}, indicator(listed(["東京", "Oslo"]))),
    "vocabulary, default": inputs({"word": WORDS}, indicator(listed(["東京", "Oslo"], default_value=1))),
    "vocabulary, oov": inputs({"word": WORDS}, indicator(listed(["東京", "Oslo"], num_oov_buckets=3))),
    "vocabulary, lists": inputs({"word": WORD_LISTS}, indicator(listed(["a", "Oslo"], num_oov_buckets=2))),
    "vocabulary of numbers": inputs({"id": [7, -1, 10, 3]}, indicator(listed([10, 7], "id", num_oov_buckets=2))),
    "vocabulary, embedded": inputs({"word": WORDS}, embedded(listed(["東京", "Oslo"]))),
    "vocabulary, embedded lists": inputs({"word": WORD_LISTS}, embedded(listed(["a", "Oslo"]))),
    "file": inputs({"word": ["Oslo", "Roma", "köln", "Bonn"]}, indicator(filed(TEXT, vocabulary_size=4))),
    "file, a part": inputs(
        {"word": ["Oslo", "Roma", "köln", "Bonn"]}, indicator(filed(TEXT, vocabulary_size=2, num_oov_buckets=2))
    ),
    "file, default": inputs({"word": ["Oslo", "Bonn"]}, indicator(filed(TEXT, vocabulary_size=4, default_value=2))),
    "file of numbers": inputs(
        {"id": [7, 10, 3]}, indicator(filed("10\n7\n", "id", vocabulary_size=2, dtype="int64", num_oov_buckets=3))
    ),
    "cross of strings": inputs({"a": ["x", "y", ""], "b": ["u", "v", "w"]}, indicator(crossed(["a", "b"]))),
    "cross, keyed": inputs({"a": ["x", "y", ""], "b": ["u", "v", "w"]}, indicator(crossed(["b", "a"], hash_key=5))),
    "cross of numbers": inputs({"a": [1, -1, 3], "b": [[4, 5], [6, 7], [8, -9]]}, indicator(crossed(["a", "b"]))),
    "cross of lists": inputs(
        {"word": WORD_LISTS, "id": LISTS, "a": ["p", "q", "r", "s"]}, indicator(crossed(["word", "id", "a"], 23))
    ),
    "cross of buckets": inputs(
        {"x": X[:4], "word": WORDS, "id": IDS},
        indicator(crossed([bucketized([0.0, 1.0]), "word", identity()], 29)),
    ),
    "cross of a vocabulary": inputs(
        {"word": WORDS, "id": [1, 2, 3, 4]}, indicator(crossed([listed(["Oslo"]), "id"], 13))
    ),
    "cross of crosses": inputs(
        {"a": ["x", "y"], "b": ["u", "v"], "id": [2, 3]}, indicator(crossed([crossed(["a", "b"], 5), identity()], 31))
    ),
    "cross, linear": linear({"a": ["x", "y"], "b": ["u", "v"]}, crossed(["a", "b"])),
    "weights, indicator": inputs({"id": LISTS, "weight": WEIGHTS}, indicator(weighted(identity()))),
    "weights, dense": inputs(
        {"id": [[0, 4], [1, 2]], "weight": [[0.5, 2.0], [1.0, 3.0]]}, indicator(weighted(identity()))
    ),
    "embedding, one an example": inputs({"id": [3, 0, 4]}, embedded(identity())),
    "embedding, missing": inputs({"id": IDS}, embedded(identity())),
    **{
        f"embedding, {combiner}{what}": inputs(
            {"id": LISTS, "weight": weights}, embedded(weighted(identity()) if what else identity(), combiner=combiner)
        )
        for combiner in ("mean", "sum", "sqrtn")
        for what, weights in {"": WEIGHTS, ", weighted": WEIGHTS, ", odd weights": ODD_WEIGHTS}.items()
    },
    **{
        f"embedding, shortened, {combiner}": inputs(
            {"id": LISTS, "weight": WEIGHTS}, embedded(weighted(identity()), combiner=combiner, max_norm=0.5)
        )
        for combiner in ("mean", "sum", "sqrtn")
    },
    "embeddings of two widths": inputs(
        {"id": IDS, "word": WORDS, "x": X[:4]},
        embedded(identity(), 2), embedded(hashed(), 4), embedded(bucketized([1.0]), 2, combiner="sum"), numeric(),
    ),  # fmt: skip
    "shared": inputs({"a": LISTS, "b": [1, 2, 3, -1]}, shared([identity("a"), identity("b")])),
    "shared, named": inputs(
        {"a": LISTS, "b": [1, 2, 3, -1]},
        shared([identity("b"), identity("a")], shared_embedding_collection_name="items", combiner="sum"),
    ),
    "linear": linear({"x": X[:4], "id": IDS, "word": WORD_LISTS}, numeric(), identity(), hashed()),
    "linear, units": linear(
        {"x": X[:4], "id": [0, 4, 9, 2], "word": WORD_LISTS, "weight": [1.0, 2.0, 3.0, 4.0]},
        numeric(), weighted(identity(default_value=0)), hashed(), units=2,
    ),  # fmt: skip
    "linear, mean": linear({"id": LISTS, "word": WORD_LISTS}, identity(), hashed(), sparse_combiner="mean"),
    "linear, sqrtn": linear({"id": LISTS, "weight": WEIGHTS}, weighted(identity()), sparse_combiner="sqrtn"),
    "linear, indicator": linear({"id": LISTS}, indicator(identity()), units=2),
}  # fmt: skip
