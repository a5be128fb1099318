"""What runs in the process where templates are rendered: it imports Jinja and the standard library, nothing above."""
