"""What should be: layouts, memory sheets, estimates and reasons. Pure, but for what says IO."""
