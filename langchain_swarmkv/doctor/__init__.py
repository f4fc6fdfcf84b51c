"""What `swarmkv doctor` finds out: rates, room, and the settings that suit model and machine."""
