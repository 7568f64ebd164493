"""What defences are made of."""
