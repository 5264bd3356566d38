"""Estimators of Autopilot (Rzadca et al., EuroSys'20)."""
