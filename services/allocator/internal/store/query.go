package store

import (
	"encoding/base64"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Filter selects sandboxes; zero fields select all.
type Filter struct {
	Namespace, Name, Pool string
	Selector              labels.Selector
	Phases                []sandboxv1.Phase
}

// ParseSelector parses a Kubernetes label selector; the error names the field label_selector.
func ParseSelector(s string) (labels.Selector, error) {
	if s == "" {
		return labels.Everything(), nil
	}
	selector, err := labels.Parse(s)
	if err != nil {
		return nil, fault.Field("label_selector", "%v", err)
	}
	return selector, nil
}

// matches reports whether a visible sandbox is selected. The cheapest conditions come first.
func (f *Filter) matches(n *snapshot) bool {
	switch {
	case !n.seen(),
		f.Namespace != "" && f.Namespace != n.key.Namespace,
		f.Name != "" && f.Name != n.key.Name,
		f.Pool != "" && f.Pool != n.pool(),
		f.Selector != nil && !f.Selector.Empty() && !f.Selector.Matches(labels.Set(n.labels())):
		return false
	}
	return len(f.Phases) == 0 || slices.Contains(f.Phases, n.phase())
}

// DefaultPage is the page size of a caller that sets none.
const DefaultPage = 100

// tokenPrefix marks the version of page tokens.
const tokenPrefix = "1\x00"

// List returns at most size matching sandboxes, in the order of namespace and name, from the end of the page with the token on,
// and the token of the next page, which is empty on the last page. A sandbox that exists all the time is on exactly one page.
func (s *Store) List(f Filter, size int, token string) ([]*sandboxv1.Sandbox, string, error) {
	if size <= 0 {
		size = DefaultPage
	}
	after, err := parseToken(token)
	if err != nil {
		return nil, "", err
	}
	page, more := s.page(f, size, after)
	if more {
		return views(page), makeToken(page[len(page)-1].key), nil
	}
	return views(page), "", nil
}

// stride is the number of sandboxes that are examined while the lock is held once: creates wait for it.
const stride = 1000

// page returns at most size matching snapshots after a key, and whether there are more.
func (s *Store) page(f Filter, size int, after Key) (page []snapshot, more bool) {
	if after.Namespace < f.Namespace {
		after = Key{Namespace: f.Namespace}
	}
	for ended := false; !ended; {
		s.mu.Lock()
		page, more, after, ended = s.table.extend(page, f, size, after)
		s.mu.Unlock()
	}
	return page, more
}

// extend examines one more stride, and returns the last key that it examined.
func (t *table) extend(page []snapshot, f Filter, size int, after Key) (longer []snapshot, more bool, last Key, ended bool) {
	examined := 0
	last, ended = after, true
	t.sorted.AscendGreaterOrEqual(after, func(key Key) bool {
		switch {
		case key == after:
			return true
		case f.Namespace != "" && key.Namespace != f.Namespace:
			return false
		case examined == stride:
			ended = false
			return false
		}
		examined++
		last = key
		n := t.snapshot(key)
		if !f.matches(&n) {
			return true
		}
		if more = len(page) == size; more {
			return false
		}
		page = append(page, n)
		return true
	})
	return page, more, last, ended
}

func views(ns []snapshot) []*sandboxv1.Sandbox {
	var all []*sandboxv1.Sandbox
	for i := range ns {
		all = append(all, ns[i].item().Sandbox)
	}
	return all
}

func makeToken(k Key) string {
	return base64.RawURLEncoding.EncodeToString([]byte(tokenPrefix + k.Namespace + "\x00" + k.Name))
}

func parseToken(token string) (Key, error) {
	if token == "" {
		return Key{}, nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(token)
	rest, ok := strings.CutPrefix(string(raw), tokenPrefix)
	namespace, name, cut := strings.Cut(rest, "\x00")
	after := Key{namespace, name}
	// The decoder accepts line breaks, and a last character that was cut off.
	if err != nil || !ok || !cut || makeToken(after) != token {
		return Key{}, fault.Field("page_token", "not a token of an earlier page")
	}
	return after, nil
}
