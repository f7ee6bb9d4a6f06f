"""What makes a rank a program of its own: its session and streams, its channel, its children, its end."""
