package ownergc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// errNoResources reports an empty discovery, which must be wrong: every API server has resources.
var errNoResources = errors.New("no resources reported by discovery")

// resource is a resource of the API server in one version.
type resource struct {
	schema.GroupVersionResource
	kind       graph.Kind
	namespaced bool
}

// resources is the result of a discovery. A RESTMapper of client-go's does not fit: it knows neither verbs (what can be watched)
// nor which groups failed (what has to be kept), so the same lists would have to be kept beside it.
type resources struct {
	// versions finds a resource by kind and version, as owner references name them.
	versions map[graph.Kind]map[string]resource
	// watched is the resource to monitor for each kind, in the version that the API server prefers.
	watched map[graph.Kind]resource
	// failed are the groups that could not be read completely.
	failed map[string]error
}

func (r resources) scopes() map[graph.Kind]graph.Scope {
	out := map[graph.Kind]graph.Scope{}
	for kind, versions := range r.versions {
		for _, v := range versions {
			out[kind] = graph.ScopeCluster
			if v.namespaced {
				out[kind] = graph.ScopeNamespaced
			}
		}
	}
	return out
}

// discover lists the resources. Groups that cannot be read are no error: they are in failed.
func discover(d Discovery, ignored []schema.GroupResource) (resources, error) {
	groups, lists, err := d.ServerGroupsAndResources()
	out := resources{versions: map[graph.Kind]map[string]resource{}, watched: map[graph.Kind]resource{}, failed: map[string]error{}}
	if err != nil {
		failed, ok := discovery.GroupDiscoveryFailedErrorGroups(err)
		if !ok {
			return out, fmt.Errorf("reading discovery: %w", err)
		}
		for gv, why := range failed {
			out.failed[gv.Group] = why
		}
	}
	if len(lists) == 0 {
		return out, errNoResources
	}
	byVersion := map[schema.GroupVersion]*metav1.APIResourceList{}
	for _, l := range lists {
		if gv, err := schema.ParseGroupVersion(l.GroupVersion); err == nil {
			byVersion[gv] = l
		}
	}
	for _, g := range groups {
		for _, version := range preferredFirst(g) {
			gv := schema.GroupVersion{Group: g.Name, Version: version}
			if l := byVersion[gv]; l != nil {
				out.add(gv, l, ignored)
			}
		}
	}
	return out, nil
}

func preferredFirst(g *metav1.APIGroup) []string {
	out := []string{g.PreferredVersion.Version}
	for _, v := range g.Versions {
		if v.Version != g.PreferredVersion.Version {
			out = append(out, v.Version)
		}
	}
	return out
}

func (r *resources) add(gv schema.GroupVersion, l *metav1.APIResourceList, ignored []schema.GroupResource) {
	for _, api := range l.APIResources {
		if strings.Contains(api.Name, "/") || !slices.Contains([]string(api.Verbs), "get") {
			continue // a subresource, or a virtual resource without objects
		}
		found := resource{GroupVersionResource: gv.WithResource(api.Name), kind: graph.Kind{Group: gv.Group, Kind: api.Kind}, namespaced: api.Namespaced}
		if r.versions[found.kind] == nil {
			r.versions[found.kind] = map[string]resource{}
		}
		if _, ok := r.versions[found.kind][gv.Version]; !ok {
			r.versions[found.kind][gv.Version] = found
		}
		watchable := discovery.SupportsAllVerbs{Verbs: []string{"delete", "list", "watch"}}.Match(l.GroupVersion, &api)
		if _, ok := r.watched[found.kind]; !ok && watchable && !slices.Contains(ignored, found.GroupResource()) {
			r.watched[found.kind] = found
		}
	}
}

// keep carries over what was known about groups that cannot be read now: they may be back soon.
func (r *resources) keep(before resources) {
	for kind, versions := range before.versions {
		if r.failed[kind.Group] == nil {
			continue
		}
		for version, found := range versions {
			if r.versions[kind] == nil {
				r.versions[kind] = map[string]resource{}
			}
			if _, ok := r.versions[kind][version]; !ok {
				r.versions[kind][version] = found
			}
		}
		if was, ok := before.watched[kind]; ok {
			r.watched[kind] = was
		}
	}
}

// sync starts and stops monitors so that exactly the discovered resources are watched.
func (c *Collector) sync(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	found, err := discover(c.Discovery, c.Ignored)
	if err != nil {
		c.metrics.syncErrors.WithLabelValues("discovery").Inc()
		return err
	}
	for group, why := range found.failed {
		c.metrics.syncErrors.WithLabelValues("group").Inc()
		log.Info("API group cannot be discovered, keeping the known resources", obs.KeyGroup, group, obs.KeyError, why.Error())
	}
	c.mu.Lock()
	found.keep(c.resources)
	before := c.resources
	c.resources = found
	start, stop := c.replan(found)
	c.mu.Unlock()
	for _, m := range stop {
		m.stop()
	}
	for kind := range before.watched {
		if _, ok := found.watched[kind]; !ok {
			log.Info("kind is no longer served", obs.KeyKind, kind.String())
			c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Drop(kind) })
		}
	}
	// References to new kinds and versions can be resolved now. A kind must be known to the graph before its objects are.
	c.update(ctx, func(g *graph.Graph) graph.Effects { return g.Kinds(found.scopes()) })
	for _, m := range start {
		m.start(ctx)
	}
	return nil
}

// replan updates the set of monitors and returns those to start and to stop. mu is held.
func (c *Collector) replan(found resources) (start, stop []*monitor) {
	wanted := map[schema.GroupVersionResource]resource{}
	for _, r := range found.watched {
		wanted[r.GroupVersionResource] = r
	}
	for gvr, m := range c.monitors {
		if _, ok := wanted[gvr]; !ok {
			delete(c.monitors, gvr)
			delete(c.failing, gvr.GroupResource())
			stop = append(stop, m)
		}
	}
	for gvr, r := range wanted {
		if c.monitors[gvr] == nil {
			m := newMonitor(c, r)
			c.monitors[gvr] = m
			start = append(start, m)
		}
	}
	return start, stop
}

func (c *Collector) stopMonitors() {
	c.mu.Lock()
	monitors := c.monitors
	c.monitors = map[schema.GroupVersionResource]*monitor{}
	c.mu.Unlock()
	for _, m := range monitors {
		m.stop()
	}
}

// resolve returns the resource of a kind in a version; an empty version means the one that is watched.
func (c *Collector) resolve(kind graph.Kind, version string) (resource, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if version == "" {
		r, ok := c.resources.watched[kind]
		return r, ok
	}
	r, ok := c.resources.versions[kind][version]
	return r, ok
}
