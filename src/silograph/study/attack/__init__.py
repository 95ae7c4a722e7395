"""What a server recovers from what it sees in a run: functions, measured by simulation."""
