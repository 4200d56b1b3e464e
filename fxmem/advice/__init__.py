"""What each habit that saves memory brings for one model: found by making the change and estimating again."""
