"""Tools of every room: files, compiled code, tables, arrays, threads; imports ``data.errors`` and ``data.schema``."""
