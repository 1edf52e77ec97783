"""What the residual connections of a trained model do."""
