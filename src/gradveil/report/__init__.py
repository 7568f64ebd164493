"""Pictures and pages: reads rows, never reruns anything."""
