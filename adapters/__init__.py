"""What binds the core to devices, models and processes, one file a thing."""
