"""Models that are made of plain parts, to be read and to be checked."""
