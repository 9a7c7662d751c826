"""Feature columns: from what a table has in its columns to the numbers that a model takes, with TensorFlow's names."""

from __future__ import annotations

from plait.feature_column.categorical import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
    weighted_categorical_column,
)
from plait.feature_column.columns import (
    CategoricalColumn,
    DenseColumn,
    FeatureColumn,
    bucketized_column,
    numeric_column,
)
from plait.feature_column.crossed import crossed_column
from plait.feature_column.embedding import embedding_column, indicator_column, shared_embedding_columns
from plait.feature_column.layers import DenseFeatures, input_layer
from plait.feature_column.linear import LinearModel, linear_model
from plait.feature_column.sequence import (
    SequenceFeatures,
    sequence_categorical_column_with_hash_bucket,
    sequence_categorical_column_with_identity,
    sequence_categorical_column_with_vocabulary_file,
    sequence_categorical_column_with_vocabulary_list,
    sequence_numeric_column,
)
from plait.feature_column.spec import FixedLenFeature, VarLenFeature, make_parse_example_spec, parse_example
from plait.feature_column.strings import Strings

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "DenseFeatures",
    "FeatureColumn",
    "FixedLenFeature",
    "LinearModel",
    "SequenceFeatures",
    "Strings",
    "VarLenFeature",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "indicator_column",
    "input_layer",
    "linear_model",
    "make_parse_example_spec",
    "numeric_column",
    "parse_example",
    "sequence_categorical_column_with_hash_bucket",
    "sequence_categorical_column_with_identity",
    "sequence_categorical_column_with_vocabulary_file",
    "sequence_categorical_column_with_vocabulary_list",
    "sequence_numeric_column",
    "shared_embedding_columns",
    "weighted_categorical_column",
]
