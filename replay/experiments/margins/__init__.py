"""The margins experiment (EuroSys'15, Figure 12): every estimator at every margin."""
