//go:build tools

// Package tools pins the Temporal CLI, whose dev server carries the server and the UI.
package tools

import _ "github.com/temporalio/cli/cmd/temporal"
