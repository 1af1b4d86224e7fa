//go:build tools

// Package tools pins cosign, which signs what our verification must accept; the folder beside it signs without a key.
package tools

import _ "github.com/sigstore/cosign/v3/cmd/cosign"
