//go:build tools

// Package tools pins the programs of Kueue's performance harness that are built from this module.
package tools

import (
	_ "sigs.k8s.io/kueue/test/performance/scheduler/minimalkueue"
	_ "sigs.k8s.io/kueue/test/performance/scheduler/runner"
)
