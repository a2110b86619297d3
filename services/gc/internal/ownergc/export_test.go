package ownergc

import (
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// What the tests of the conversions see.
var (
	Discover       = discover
	ErrNoResources = errNoResources
	Observed       = observed
	References     = references
	Patch          = patch
	NotThere       = notThere
)

// Watched are the resources to be monitored, by kind.
func (r resources) Watched() map[string]string {
	out := map[string]string{}
	for kind, found := range r.watched {
		out[kind.String()] = found.GroupVersion().String() + "/" + found.Resource
	}
	return out
}

// Scopes is scopes.
func (r resources) Scopes() map[graph.Kind]graph.Scope { return r.scopes() }

// Versions are those of a kind.
func (r resources) Versions(kind graph.Kind) int { return len(r.versions[kind]) }

// Failed is the number of groups that could not be read.
func (r resources) Failed() int { return len(r.failed) }

// Keep is keep.
func (r *resources) Keep(before resources) { r.keep(before) }
