"""What a network computes, layer by layer: gradients per example, features, and who calls whom."""
