"""Several engines behind one door: where sequences are, who is called, how answers are joined."""
