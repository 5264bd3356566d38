"""Models: estimators, margins, fitting, evaluation and tracking; imports ``features`` and ``data``."""
