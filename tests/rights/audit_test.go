//go:build integration

package rights_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/rights"
)

// request is what the audit log has about a request to the API server.
type request struct {
	Verb string `json:"verb"`
	User struct {
		Username string `json:"username"`
	} `json:"user"`
	Object *struct {
		Group       string `json:"apiGroup"`
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	URI         string            `json:"requestURI"`
	Annotations map[string]string `json:"annotations"`
}

// account returns the name of the ServiceAccount in one of the mesh's namespaces that made the request; empty for other users.
func (r request) account() string {
	for _, namespace := range []string{system, janitors} {
		if name, ok := strings.CutPrefix(r.User.Username, "system:serviceaccount:"+namespace+":"); ok {
			return name
		}
	}
	return ""
}

func (r request) refused() bool {
	return r.Annotations["authorization.k8s.io/decision"] == "forbid"
}

func (r request) uses(right rights.Right) bool {
	if r.Object == nil || right.Account != r.account() {
		return false
	}
	resource := r.Object.Resource
	if r.Object.Subresource != "" {
		resource += "/" + r.Object.Subresource
	}
	permits := func(verb string) bool {
		return right.Permits(verb, r.Object.Group, resource, r.Object.Namespace, r.Object.Name)
	}
	// A watch that begins with all objects takes the place of a list, where the API server offers that. Elsewhere it is a list.
	return permits(r.Verb) || r.Verb == "watch" && strings.Contains(r.URI, "sendInitialEvents=true") && permits("list")
}

// String returns a line for messages.
func (r request) String() string { return fmt.Sprintf("%s: %s %s", r.User.Username, r.Verb, r.URI) }

// requests returns the requests of the components so far.
func (c *cluster) requests() []request {
	c.t.Helper()
	file, err := os.Open(c.audit)
	require.NoError(c.t, err)
	defer func() { _ = file.Close() }()
	var out []request
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r request
		if json.Unmarshal(lines.Bytes(), &r) == nil && r.account() != "" { // the last line may be incomplete
			out = append(out, r)
		}
	}
	require.NoError(c.t, lines.Err())
	return out
}

// unused is a right that this test need not see used.
type unused struct {
	account, verb, resource string // empty: any
	reason                  string
}

func (u unused) covers(r rights.Right) bool {
	return (u.account == "" || u.account == r.Account) && u.verb == r.Verb && (u.resource == "" || u.resource == r.Resource)
}

var unusedRights = []unused{
	{"", "patch", "events", "client-go patches an Event that is repeated within some minutes"},
	{"", "list", "endpointslices", "the resolver of Services lists once in half an hour, and watches in between"},
	{"controller", "update", "sandboxpools/finalizers", "the API server asks for it while it admits an agent Pod, which is not in the audit log"},
	{"controller", "delete", "secrets", "the same, when the controller gives a Secret an owner"},
	{"gc", "get", "", "gc gets an owner that no watch shows, of whatever kind; the test has one ConfigMap of that sort"},
}

// checkRefused fails the test for each request of a component that was refused.
func (c *cluster) checkRefused(t *testing.T) {
	t.Helper()
	seen := map[string]bool{}
	for _, r := range c.requests() {
		if r.refused() && !seen[r.String()] {
			seen[r.String()] = true
			t.Errorf("refused: %s", r)
		}
	}
}

// checkUnused fails the test for each right that no request needed.
func (c *cluster) checkUnused(t *testing.T) {
	t.Helper()
	used := make([]bool, len(c.rights))
	for _, r := range c.requests() {
		for i, right := range c.rights {
			used[i] = used[i] || r.uses(right)
		}
	}
	for i, right := range c.rights {
		if used[i] || excused(right) {
			continue
		}
		t.Errorf("unused: %s", right)
	}
	for _, u := range unusedRights {
		exists := false
		for _, right := range c.rights {
			exists = exists || u.covers(right)
		}
		require.True(t, exists, "no right to %s %s of %s is left to excuse", u.verb, u.resource, u.account)
	}
}

func excused(r rights.Right) bool {
	for _, u := range unusedRights {
		if u.covers(r) {
			return true
		}
	}
	return false
}
