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

// Matches tells whether a sandbox is selected; nil is not.
func (f *Filter) Matches(sb *sandboxv1.Sandbox) bool {
	switch {
	case sb == nil,
		f.Namespace != "" && f.Namespace != sb.GetNamespace(),
		f.Name != "" && f.Name != sb.GetName(),
		f.Pool != "" && f.Pool != sb.GetSpec().GetPool(),
		len(f.Phases) > 0 && !slices.Contains(f.Phases, sb.GetStatus().GetPhase()):
		return false
	}
	return f.Selector == nil || f.Selector.Matches(labels.Set(sb.GetLabels()))
}

// DefaultPage is the size of a page whose caller names none.
const DefaultPage = 100

// tokenPrefix marks the version of page tokens.
const tokenPrefix = "1\x00"

// List returns at most size sandboxes that match, in the order of namespace and name, from after the page that ended with
// token, and the token of the next page, empty on the last. A sandbox that is there all the time is on exactly one page.
func (s *Store) List(f Filter, size int, token string) ([]*sandboxv1.Sandbox, string, error) {
	if size <= 0 {
		size = DefaultPage
	}
	after, err := parseToken(token)
	if err != nil {
		return nil, "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var page []*sandboxv1.Sandbox
	var last Key
	next := ""
	s.sorted.AscendGreaterOrEqual(after, func(key Key) bool {
		sb := s.entries[key].item.Sandbox
		switch {
		case key == after, !f.Matches(sb):
		case len(page) == size:
			next = makeToken(last)
			return false
		default:
			page, last = append(page, sb), key
		}
		return true
	})
	return page, next, nil
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
	if err != nil || !ok || !cut {
		return Key{}, fault.Field("page_token", "not a token of an earlier page")
	}
	return Key{namespace, name}, nil
}
