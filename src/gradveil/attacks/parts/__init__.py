"""What attacks are made of: objectives, priors, optimisers, label recovery. All work on many targets at once."""
