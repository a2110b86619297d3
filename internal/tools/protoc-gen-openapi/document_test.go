package main

import (
	"encoding/json"
	"strings"
	"testing"
)

const sandboxes = `{
  "tags": [{"name": "S", "description": "S runs\nsandboxes."}],
  "paths": {
    "/v1/{namespace}/s/{name}": {"get": {
      "summary": "Get returns one. It does\nnot block.", "operationId": "S_Get",
      "parameters": [{"name": "namespace", "in": "path"}],
      "responses": {"200": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/a.v1.Sandbox"}}}}}
    }},
    "/v1/{sandbox.namespace}/s/{sandbox.name}": {"patch": {
      "summary": "Update changes one.", "operationId": "S_Update",
      "parameters": [{"name": "sandbox.namespace", "in": "path"}, {"name": "a.b", "in": "query"}]
    }}
  },
  "components": {"schemas": {"a.v1.Sandbox": {"type": "object"}, "a.v1.Sandbox.Type": {"type": "string"}, "a.v1.Place": {"type": "object"}}}
}`

const watches = `{
  "tags": [{"name": "R", "description": "R watches."}],
  "paths": {"/v1/s:watch": {"get": {
    "summary": "Watch sends changes.", "operationId": "R_Watch_1",
    "responses": {
      "200": {"description": "A change.", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/b.v1.Place"}}}},
      "default": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/google.rpc.Status"}}}}
    }
  }}},
  "components": {"schemas": {"b.v1.Place": {"type": "object"}, "google.rpc.Status": {"type": "object"}}}
}`

// at returns the value at a path of keys, which spaces separate.
func at(t *testing.T, v any, path string) any {
	t.Helper()
	for key := range strings.FieldsSeq(path) {
		o, ok := v.(object)
		if !ok {
			t.Fatalf("no object at %s", path)
		}
		v = o[key]
	}
	return v
}

func TestMerge(t *testing.T) {
	frame := object{
		"info":  object{"title": "T"},
		"paths": object{"/v1/s:watch": object{"get": object{"responses": object{"200": object{"content": object{"text/plain": object{}}}}}}},
	}
	raw, err := merge([][]byte{[]byte(sandboxes), []byte(watches)}, map[string]bool{"R_Watch": true}, frame)
	if err != nil {
		t.Fatal(err)
	}
	var got object
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	const item, stream = "paths /v1/{namespace}/s/{name} ", "paths /v1/s:watch get responses 200 content "
	for name, tc := range map[string]struct{ path, want string }{
		"version":          {"openapi", "3.1.0"},
		"frame":            {"info title", "T"},
		"summary":          {item + "get summary", "Get returns one"},
		"description":      {item + "get description", "Get returns one. It does not block."},
		"shared path":      {item + "patch operationId", "S_Update"},
		"short name":       {item + "get responses 200 content application/json schema $ref", "#/components/schemas/Sandbox"},
		"nested name":      {"components schemas Sandbox.Type type", "string"},
		"ambiguous name":   {"components schemas a.v1.Place type", "object"},
		"stream's message": {stream + "application/x-ndjson schema properties result $ref", "#/components/schemas/b.v1.Place"},
		"stream's error":   {stream + "application/x-ndjson schema properties error $ref", "#/components/schemas/Status"},
	} {
		t.Run(name, func(t *testing.T) {
			if have := at(t, got, tc.path); have != tc.want {
				t.Errorf("got %v, want %v", have, tc.want)
			}
		})
	}
	if at(t, got, stream+"application/json") != nil {
		t.Error("a stream is not one JSON document")
	}
	if at(t, got, stream+"text/plain") == nil {
		t.Error("the frame replaced what it should extend")
	}
	parameters, _ := at(t, got, item+"patch parameters").([]any)
	if len(parameters) != 2 || at(t, parameters[0], "name") != "namespace" || at(t, parameters[1], "name") != "a.b" {
		t.Errorf("parameters are %v", parameters)
	}
}

func TestMergeRefusesTwoOperations(t *testing.T) {
	if _, err := merge([][]byte{[]byte(sandboxes), []byte(sandboxes)}, nil, nil); err == nil {
		t.Error("two operations share a path and a method")
	}
}
