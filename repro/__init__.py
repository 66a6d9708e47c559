"""Programs that show the fault: a minimal crash and a real trainer."""
