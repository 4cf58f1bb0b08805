"""What the traced program says about a value: who carries an axis of it on, who reads it, who writes it."""
