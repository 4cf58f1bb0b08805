"""Models that are made of plain parts, to be read, trained and checked: one placement of the norms is one argument."""

from __future__ import annotations

from normwise.models.decoder import Decoder as Decoder
from normwise.models.encoder import Encoder as Encoder
from normwise.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from normwise.models.inits import INITS as INITS
from normwise.models.inits import initialise as initialise
from normwise.models.profiling import profile_admin as profile_admin

__all__ = ["INITS", "Decoder", "Encoder", "EncoderDecoder", "initialise", "profile_admin"]
