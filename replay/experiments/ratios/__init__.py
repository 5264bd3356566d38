"""The ratios experiment (EuroSys'15, Figure 11): usage and reservation over the limit."""
