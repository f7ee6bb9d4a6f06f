"""What makes a rank a program of its own: its session and streams, its channel, what it imports, its end."""
