package caller

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

// request is one request of REST. VICTIM, OWN, TARGET and POOL stand for the namespaces of the tenants, the target and its pool.
type request struct{ name, method, path, body string }

func (r request) fill(s *mesh.Scene) request {
	replace := strings.NewReplacer("VICTIM", s.Victim.Namespace, "OWN", s.Hostile.Namespace, "TARGET", s.Target.Name, "POOL", s.Victim.Pool, "UID", s.Target.UID)
	r.path, r.body = replace.Replace(r.path), replace.Replace(r.body)
	return r
}

func restCalls() []attempt {
	const spec = `"spec":{"image":"docker.io/fast-sandbox/escape-root:dev","pool":"POOL","args":["end"]}`
	var out []attempt
	for _, r := range []request{
		{"get", "GET", "/v1/namespaces/VICTIM/sandboxes/TARGET", ""},
		{"list", "GET", "/v1/namespaces/VICTIM/sandboxes", ""},
		{"list all", "GET", "/v1/sandboxes", ""},
		{"watch", "GET", "/v1/namespaces/VICTIM/sandboxes:watch", ""},
		{"watch all", "GET", "/v1/sandboxes:watch", ""},
		{"logs", "GET", "/v1/namespaces/VICTIM/sandboxes/TARGET:logs", ""},
		{"create", "POST", "/v1/namespaces/VICTIM/sandboxes", `{"name":"foreign-rest",` + spec + `}`},
		{"update", "PATCH", "/v1/namespaces/VICTIM/sandboxes/TARGET?updateMask=labels", `{"labels":{"owned":"yes"}}`},
		{"delete", "DELETE", "/v1/namespaces/VICTIM/sandboxes/TARGET?uid=UID", ""},
		{"agents", "GET", "/v1/namespaces/VICTIM/agents", ""},
		{"all agents", "GET", "/v1/agents", ""},
		{"pools", "GET", "/v1/namespaces/VICTIM/pools", ""},
		{"images", "GET", "/v1/namespaces/VICTIM/pools/POOL/images", ""},
		{"API keys", "GET", "/v1/namespaces/VICTIM/apikeys", ""},
	} {
		out = append(out, attempt{name: r.name, does: "requests another tenant's resource with the token of a tenant", success: "the answer is not that it is forbidden, or the sandbox has changed",
			run: func(ctx context.Context, s *mesh.Scene, c *gateway) (string, error) {
				f := r.fill(s)
				a, err := c.do(ctx, s.Hostile.Token, f.method, f.path, f.body)
				if err != nil {
					return "", suite.Brokenf("calling: %w", err)
				}
				return a.allowed()
			}})
	}
	// Requests that name one namespace for the authorization, and want another.
	for _, r := range []request{
		{"namespace in the body", "POST", "/v1/namespaces/OWN/sandboxes", `{"namespace":"VICTIM","name":"foreign-body",` + spec + `}`},
		{"namespace in the query", "GET", "/v1/namespaces/OWN/sandboxes?namespace=VICTIM", ""},
		{"namespace in the query of a get", "GET", "/v1/namespaces/OWN/sandboxes/TARGET?namespace=VICTIM&name=TARGET", ""},
		{"namespace in the query of a delete", "DELETE", "/v1/namespaces/OWN/sandboxes/TARGET?namespace=VICTIM", ""},
		{"namespace in the body of an update", "PATCH", "/v1/namespaces/OWN/sandboxes/TARGET?updateMask=labels", `{"namespace":"VICTIM","name":"TARGET","labels":{"owned":"yes"}}`},
		{"namespace in the mask", "PATCH", "/v1/namespaces/OWN/sandboxes/TARGET?updateMask=namespace", `{"namespace":"VICTIM"}`},
		{"encoded slashes", "GET", "/v1/namespaces/OWN%2F..%2FVICTIM/sandboxes/TARGET", ""},
		{"double slashes", "GET", "/v1/namespaces/OWN//../VICTIM/sandboxes/TARGET", ""},
		{"dots", "GET", "/v1/namespaces/OWN/../VICTIM/sandboxes", ""},
		{"encoded dots", "GET", "/v1/namespaces/OWN/%2e%2e/VICTIM/sandboxes", ""},
		{"zero byte", "GET", "/v1/namespaces/OWN%00/sandboxes", ""},
		{"a method within the path", "GET", "/v1/namespaces/OWN/sandboxes/..%2F..%2FVICTIM%2Fsandboxes%2FTARGET:logs", ""},
	} {
		out = append(out, confused(r))
	}
	return append(out, attempt{name: "method in a header", does: "sends a harmless request whose headers name another method", success: "the sandbox has changed",
		run: func(ctx context.Context, s *mesh.Scene, c *gateway) (string, error) {
			a, err := c.do(ctx, s.Hostile.Token, http.MethodPost, "/v1/namespaces/"+s.Victim.Namespace+"/sandboxes/"+s.Target.Name, "", "X-HTTP-Method-Override", "DELETE", "X-Method-Override", "DELETE")
			if err != nil {
				return "", suite.Brokenf("calling: %w", err)
			}
			if evidence, refused := a.allowed(); a.code != http.StatusNotFound {
				return evidence, refused
			}
			return "", errors.New("the path has no such method")
		}})
}

// confused is a request whose answer is allowed, as long as nothing of another tenant is in it or changes.
func confused(r request) attempt {
	return attempt{name: r.name, does: r.method + " " + r.path + " " + r.body, success: "the answer has a sandbox of another tenant, one was made there, or it has changed",
		run: func(ctx context.Context, s *mesh.Scene, c *gateway) (string, error) {
			f := r.fill(s)
			a, err := c.do(ctx, s.Hostile.Token, f.method, f.path, f.body)
			if err != nil {
				return "", suite.Brokenf("calling: %w", err)
			}
			if strings.Contains(a.body, s.Target.UID) || strings.Contains(a.body, s.Target.ContainerID) {
				return "the answer has the sandbox of another tenant: " + a.body, nil
			}
			list, err := s.Victim.Sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: s.Victim.Namespace})
			if err != nil {
				return "", suite.Brokenf("listing the sandboxes: %w", err)
			}
			for _, box := range list.GetSandboxes() {
				if strings.HasPrefix(box.GetName(), "foreign-") || box.GetLabels()["owned"] != "" {
					return "the other tenant has " + protojson.Format(box), nil
				}
			}
			_ = s.Hostile.Delete(ctx, "foreign-body") // if it was made in its own namespace
			_, refused := a.allowed()
			if refused == nil {
				refused = errors.New("the answer is about its own namespace")
			}
			return "", refused
		}}
}
