"""What makes another body of a payload before it is sent, and another answer of one before it is stored."""
