"""What the commands train, attack and score do."""
