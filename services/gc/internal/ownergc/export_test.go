package ownergc

import (
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// Exported for tests.
var (
	Discover       = discover
	ErrNoResources = errNoResources
	Observed       = observed
	References     = references
	Patch          = patch
	IsGone         = isGone
)

// Watched returns the resources to monitor, by kind.
func (r resources) Watched() map[string]string {
	out := map[string]string{}
	for kind, found := range r.watched {
		out[kind.String()] = found.GroupVersion().String() + "/" + found.Resource
	}
	return out
}

// Scopes exports scopes.
func (r resources) Scopes() map[graph.Kind]graph.Scope { return r.scopes() }

// Versions returns the number of versions of a kind.
func (r resources) Versions(kind graph.Kind) int { return len(r.versions[kind]) }

// Failed returns the number of groups that could not be read.
func (r resources) Failed() int { return len(r.failed) }

// Keep exports keep.
func (r *resources) Keep(before resources) { r.keep(before) }
