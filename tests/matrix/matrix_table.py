"""All rows, by kind."""

from __future__ import annotations

from matrix_more import SERIES, SEVERAL, SOUND
from matrix_others import OTHERS
from matrix_own import OWN
from matrix_rows import Row, transformers_row
from matrix_stages import CONVOLUTIONAL
from matrix_text import DECODERS, ENCODER_DECODERS, ENCODERS, STATE_SPACE
from matrix_vision import VISION

TRANSFORMERS = {
    "Decoders": DECODERS,
    "State-space and recurrent models": STATE_SPACE,
    "Encoders": ENCODERS,
    "Encoders with decoders": ENCODER_DECODERS,
    "Vision by convolutions or stages": CONVOLUTIONAL,
    "Other vision": VISION,
    "Sound": SOUND,
    "Several kinds of input": SEVERAL,
    "Series": SERIES,
}

ROWS: list[Row] = [
    *(
        transformers_row(family, kind)
        for kind, families in TRANSFORMERS.items()
        for family in families
    ),
    *OTHERS,
    *OWN,
]
